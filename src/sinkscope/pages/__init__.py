"""What pages, notebooks and terminals show results with; which result shows what is decided in its room.

figure.py      figures as data: traces, a layout and the table under it
html.py        a page as one file, from a template; base.html and parts.html hold what all templates share
drawn.py       the same figures by matplotlib
text.py        makes texts from models and users safe to show
terminal.py    tables and sentences on standard output; progress.py: bars on standard error
"""
