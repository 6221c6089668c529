"""Ray-orchestrated data service for multimodal pretraining; importing it pulls in nothing heavy."""

__version__ = "0.1.0"
