"""The command line: parse, load, analyse, render. The only room with typer."""
