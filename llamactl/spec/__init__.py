"""What a decoder is made of. Standard library only."""
