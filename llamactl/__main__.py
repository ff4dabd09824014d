"""`llamactl` and `python -m llamactl`. The version needs no imports, so it gets none."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line in sys.argv; the exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from llamactl import __version__

        print(f"llamactl {__version__}")
        return 0
    import gc

    # A command lives for a tenth of a second and makes little garbage; looking for it at every turn costs 5% of that.
    gc.set_threshold(50_000)
    from llamactl.cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
