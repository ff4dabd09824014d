"""llamactl: what a language model is made of, what it costs, and whether this copy of it is right."""

__version__ = "0.1.0"
