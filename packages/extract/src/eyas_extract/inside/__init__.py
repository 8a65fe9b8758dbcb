"""What runs inside SGLang's ranks: hooks on the target, shared buffers on the way out, and the writer process."""
