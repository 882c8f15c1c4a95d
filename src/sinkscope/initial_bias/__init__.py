"""Which tokens a model prefers before any training.

bias.py           `bias` loads or draws the models, and puts the parts below together in a Bias
measurement.py    what is measured of one model on random sequences; contraction.py: how far its states contract
controls.py       changes of a model, each of which removes one suspected cause
tables.py         the measurements as tables
schemas.py, page.py, cli.py    the tables declared, the page and the command
"""
