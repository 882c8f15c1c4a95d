"""What fewer bits cost, which tokens are sinks, and what helps.

audit.py            `audit` puts the parts below together in an AuditResult (audit_result.py)
texts.py            which texts calibrate and which are held out; evaluation.py measures everything on them once
schemes.py          the schemes, and their groups of modules; formats.py: how numbers are rounded;
                    static_scales.py: static ranges
damage.py           what a scheme costs; prediction.py predicts it for every module, from gradients.py
remedies.py         what helps, each beside a control; advice.py: safe, repair or avoid; recipe.py: as files
remedy.py           `remedy` gives a RemedyResult (remedy_result.py), with its page and its command
                    (remedy_page.py, remedy_cli.py)
sink_tokens.py      `sink_tokens`; sink_neurons.py: sinks recognised without attention
prefix.py           `sink_prefix`
schemas.py, audit_page.py, cli.py    the tables, the page and the command of an audit
"""
