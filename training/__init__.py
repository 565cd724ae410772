"""Trains the encoder and the reranker; meets serving on disk only, at an artifact."""
