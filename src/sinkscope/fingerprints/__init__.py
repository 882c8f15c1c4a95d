"""Which models began with the same weights.

fingerprint.py    `fingerprint` signs every model, compares the pairs and gives each a verdict
signature.py      the states of a model on random sequences, and their file
alignment.py      the comparison of two signatures; seedprint.py: the published one
schemas.py, page.py, cli.py    the tables, the page and the command
"""
