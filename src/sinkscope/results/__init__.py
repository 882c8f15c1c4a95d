"""A result, its folder, and how a folder is read back.

result.py        the base of every result: story, summary, tables, `save`, `report`, `plot`
kinds.py         the kinds of results, as every room declares its own
tables.py        tables in Parquet, every column declared with its meaning
run_folder.py    writes a folder that appears only when it is complete
run.py           reads one, and checks it with validated.py: anybody may have made it
saved.py         `load_result`, and the page of a folder; cli.py: the command `sinkscope report`
parts.py         finished parts of long work, from which a killed run resumes
"""
