"""treeconv checks that tree speculative sampling is lossless at every temperature."""

__version__ = "0.1.0"
