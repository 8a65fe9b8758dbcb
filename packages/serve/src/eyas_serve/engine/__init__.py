"""What runs inside SGLang's own processes, started by its interpreter: `python -m eyas_serve.engine.main`."""
