package page

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

const (
	// A live tail ends after this time or this many attempts, so that a forgotten one costs little.
	maxTail     = 10 * time.Minute
	maxTailRows = 2000
)

type tailView struct {
	Destination string
	Failed      bool
	Result      string
}

// tail streams attempts as rows of HTML, so that it works without a script.
func (p *Page) tail(w http.ResponseWriter, r *http.Request) {
	t := tailView{Destination: r.FormValue("destination"), Failed: r.FormValue("failed") != "", Result: result(r)}
	ctx, cancel := context.WithTimeout(r.Context(), maxTail)
	defer cancel()
	attempts := make(chan adminapi.Attempt)
	dispatchers, _ := p.dispatchers()
	for _, client := range dispatchers {
		go func() {
			for a, err := range client.Tail(ctx, t.Destination, "") {
				if err != nil {
					return
				}
				select {
				case attempts <- a.Attempt:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{})
	p.render(w, "tail.html", frame{Title: "Live tail - Posthorn", Active: "tail", Data: t})
	_ = control.Flush()
	for rows := 0; rows < maxTailRows; {
		select {
		case <-ctx.Done():
			_ = templates.ExecuteTemplate(w, "tail-end.html", maxTail.String())
			return
		case a := <-attempts:
			if namespace, _, _ := strings.Cut(a.Destination, "/"); t.Failed && a.Reason == "" || !hasResult(t.Result, a.StatusCode, a.Reason) ||
				!p.shows(namespace) {
				continue
			}
			rows++
			if templates.ExecuteTemplate(w, "tail-row.html", a) != nil || control.Flush() != nil {
				return
			}
		}
	}
	_ = templates.ExecuteTemplate(w, "tail-end.html", "2,000 attempts")
}
