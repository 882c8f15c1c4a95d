"""From a name to a model that can be read, and from text to token ids.

loading.py         `load`: names, folders, .gguf files (gguf_files.py) and objects become a LoadedModel (loaded.py).
                   checkpoint_checks.py and quantised.py refuse what cannot be read as it was written
anatomy.py         where a model keeps its parts, as finding.py finds them or a row of families.py says
weights.py         the weights one by one, and their hash; sharded.py: of models that processes share
rotation.py, insert_head_norm.py    change a model; initial.py draws untrained ones from a configuration
token_batches.py   `token_batch`: random tokens or a text file; given_ids.py: ids of the caller; prompts.py: texts
tokenized_text.py  what the tokenizer, loaded by tokenizer_loading.py, makes of a text
cli.py             the command `sinkscope models`
"""
