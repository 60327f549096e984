"""Terminal output of the chat.

On a terminal, an answer is Markdown (`live`), rendered block by block (`markdown`). A block that is
followed by another can no longer change and is written for good. The last block is a draft: an
undecided end is held back, and open emphasis is closed. `region` redraws the draft's lines at the
end of the screen, from the first that differs. On pipes and dumb terminals, the text is written as
it arrives (`display.PlainDisplay`)."""
