"""The token cache as a speculator of vLLM's Model Runner V2 (docs/engines.md).

The runner never waits for the device, so the host knows an output only up to one of the last steps. `retrieval.py`
searches the cache, in a thread of its own, for passages that continue what is known; on the device, where they stay,
`matching.py` (and its kernels in `matching_triton.py`) finds where in them, or in the request's own text, the output
stands, and drafts what follows.
"""
