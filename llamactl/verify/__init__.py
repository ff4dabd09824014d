"""Two models side by side: how far apart they are, where it begins, and which edit explains it."""
