"""Tool calls in the text of an answer: one file a form, one machine under all of them."""
