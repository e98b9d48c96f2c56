"""vLLM and SGLang: what is installed, how it is started, asked, counted and patched."""
