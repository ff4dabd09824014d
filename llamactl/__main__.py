"""`llamactl` and `python -m llamactl`. The version needs no imports, so it gets none."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line in sys.argv; the exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]) and sys.stdout is not None:
        from llamactl import __version__

        try:
            print(f"llamactl {__version__}", flush=True)
            return 0
        except OSError:  # a closed pipe, a full disk: `run` meets it again, and knows what to say
            pass
    import gc

    # A command lives for a tenth of a second and makes little garbage; looking for it at every turn costs 5% of that.
    gc.set_threshold(50_000)
    try:
        from llamactl.cli.app import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while importing, before `run` could take over
        print("error[interrupted]: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
