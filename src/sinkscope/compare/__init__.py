"""Runs side by side in one page: page.py draws it from their folders, and cli.py is the command."""
