"""Images: data sets, file formats, loading, augmentation, encoders, evaluation."""
