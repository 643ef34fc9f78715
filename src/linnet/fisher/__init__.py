"""Door 3: `FisherEmbedding`, similarity of networks, distillation."""
