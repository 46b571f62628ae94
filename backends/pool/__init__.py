"""Several servers of one model as one backend: health, retries, discovery. Which one takes a call: `placement`."""
