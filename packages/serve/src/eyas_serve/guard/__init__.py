"""The guard: refuses, inside SGLang, a draft that cannot work. torch and sglang are imported in functions only."""
