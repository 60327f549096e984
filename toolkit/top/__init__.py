"""The dashboard `tk top`: Prometheus metrics of servers, read periodically, as one screen.

A `Source` (HTTP, a recording, the demo) returns `Reading`s, which are also the lines of a
recording. A `Server` keeps those of the window, and the points of the charts. A `View` has all
numbers, of one server or several. The pages turn it into lines of named styles and do not know the
terminal; Textual shows them. Histograms are counts between bounds, so that servers with different
bounds add up. Readings from before a restart of a server are never subtracted from later ones."""
