"""jaxdec: every decoding strategy that matters for one request, chosen on evidence."""
