"""What ships with Tandem so that a first run needs no download: a tiny model and its tokenizer, made on first use."""
