"""Door 4: `attach_head`, a head for labels that the network was not trained on."""
