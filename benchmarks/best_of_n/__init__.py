"""`agentspec bench best-of-n`: which drafter serves several sampled answers to one question best."""
