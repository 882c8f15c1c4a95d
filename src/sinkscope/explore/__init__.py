"""The live page.

cli.py            the command; it opens what is to be looked at and starts the server
sources.py        a model that reads prompts under interventions, or a finished trace
text_result.py    what the page shows of one text
server.py         answers the page's requests, for this machine alone; assets holds the page
"""
