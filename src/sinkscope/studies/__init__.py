"""Decides link by link what causes the sink of a model. What calls what, in the order in which it runs:

study.py              `study` traces the model and puts the parts below together in a Study
link_values.py        the numbers by sequence for the claims about the baseline; fresh.py: the same without training
minimal_set.py        searches the neurons that write the sink; controls.py draws sets that do as much elsewhere
condition_runner.py   makes, calibrates and runs the conditions of conditions.py, each into a condition_result.py
checks.py             whether conditions did what their names say
study_data.py         all numbers together, from which claims and tables are made
claims.py             CLAIMS, with causal_claims.py and mixing_claims.py; judging.py turns numbers into a verdict
texts.py              the text that is read beside random tokens; purpose.py: what the sink is for there
answer.py             the answer in a few sentences
tables.py, schemas.py, page.py with figures.py, cli.py    the tables, the page and the command
"""
