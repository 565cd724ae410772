"""Serves the encoder, the reranker and the embedder; never imports training or data."""
