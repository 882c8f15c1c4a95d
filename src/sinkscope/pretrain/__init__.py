"""Training small decoders, watching their sinks appear, and comparing the runs.

How `sinkscope pretrain` (cli.py) becomes a run, and which file does what:

1. presets.py turns a preset's name or a YAML file, with the options, into a `PretrainConfig` (config.py).
2. train.py opens the run folder, or checks that the existing one has this configuration.
3. text_sources.py reads documents; tokenize.py turns them into shards; tokens.py reads shards as batches, by step.
4. decoder.py builds the model from a `DecoderConfig` (decoder_config.py), its weights drawn from the seed.
5. training_run.py is the loop. For each batch it calls step.py, where the loss and one update are computed, with the
   optimisers of optimisers.py and the processes of parallel.py (one, DDP or FSDP2).
6. metrics.py writes the numbers of each update; probes.py traces the sink chain every few hundred steps.
7. checkpoints.py saves what a run resumes from, and exports the model for transformers at the end.

Afterwards: runs.py reads finished runs, comparison.py puts them side by side as tables, appearances.py says when each
link of the chain appears, and figures.py and page.py show it. saved.py reads a comparison back; schemas.py declares its
tables. model_specs.py gives `sinkscope.load` the models of runs, such as init:RUN.
"""
