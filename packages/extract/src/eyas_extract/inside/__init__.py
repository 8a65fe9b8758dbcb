"""What runs inside SGLang's ranks: hooks on the target, buffers on the way to the host, writers of shard files."""
