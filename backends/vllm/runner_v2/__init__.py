"""The token cache as a speculator of vLLM's Model Runner V2 (docs/engines.md).

The runner never waits for the device, so the host knows an output only up to one of the last steps. `retrieval.py`
searches the cache on the host for passages that continue what is known; on the device `matching.py` (and its kernels in
`matching_triton.py`) finds where in them, or in the request's own text, the output has got to, and drafts what follows.
"""
