"""The torch network of a Model: blocks, decoder, cache, weights, sampling. One of the two rooms with torch."""
