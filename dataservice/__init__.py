"""Ray-orchestrated data service for multimodal pretraining; importing it pulls in nothing heavy."""

__version__ = "0.2.0.dev0"
