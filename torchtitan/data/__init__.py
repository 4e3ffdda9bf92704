"""From files or the Hub to batches of tokens: tokenizers, document sources, packing, the resumable loader."""
