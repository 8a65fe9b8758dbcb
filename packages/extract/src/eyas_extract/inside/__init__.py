"""What runs inside SGLang's ranks: hooks on the target, shared buffers on the way to the host, and the writer process."""
