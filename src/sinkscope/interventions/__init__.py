"""Changes of a forward pass. How one that is written as `amplify 10:4` becomes a result:

specs.py          parses it with its entry in kinds.py, which also names its maker, its check and its control
intervene.py      `intervene`: traces before, under the interventions and under the control; runs the checks
mask.py, aggregation.py, matching.py, neurons.py, residual.py    the classes, by what they act on
base.py           what all of them share: where they act, how they open, close and compose
calibration.py    the sequences on which means are taken; formulas.py: the new aggregation, as formulas
checks.py         what must have come about, and check_results.py whether it did
plan.py           the layers and neurons that a trace suggests to act on
schemas.py, page.py, cli.py    the tables, the page and the command
"""
