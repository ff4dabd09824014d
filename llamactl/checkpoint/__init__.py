"""Bytes on disk, read without torch: what a weights file or a model folder holds, told from the headers alone. Every
file here is untrusted: it is `stat`ed before it is opened, every number in it is checked before it is used, and what
breaks the format is refused with the numbers that show it."""
