"""kvasir-tiny-wedlm: kvasir-tiny's world for a model that fills a window of masks in each pass (WeDLM)."""
