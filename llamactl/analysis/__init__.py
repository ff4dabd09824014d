"""Pure costs: a Model in, a frozen report out. Every report has `to_dict()`, the JSON that a user reads."""
