"""Several sampled answers to one question, recorded once and replayed with one drafter after another."""
