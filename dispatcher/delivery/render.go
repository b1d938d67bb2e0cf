package delivery

import (
	"bytes"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Rendered is a request to an endpoint, as Render makes it.
type Rendered struct {
	Endpoint, Method, URL string
	// Headers in the order in which they are sent.
	Headers []egress.Header
	Body    []byte
}

// Render returns the requests for a message of a Source ("namespace/name") to the endpoints of an active destination of the same
// namespace, as they would be sent at a time; none if spec.request omits the message. It sends nothing. The error is why no
// request can be made.
func Render(namespace string, c *liveconfig.Destination, m *queue.Message, now time.Time) ([]Rendered, error) {
	client := egress.New(egress.Options{})
	defer client.Close()
	set, err := newDestinationConfig(c, nil, client)
	if err != nil {
		return nil, err
	}
	p := post{set: set, message: queue.Delivery{ID: m.ID, Type: m.Type, AcceptedAt: m.AcceptedAt, LongNumbers: m.LongNumbers, Body: m.Body}}
	p.message.Lane.Source, p.message.Lane.Destination = m.Source, namespace+"/"+c.Name
	request, _, err := set.request(&p.message)
	if err != nil || request.Omitted {
		return nil, err
	}
	p.body = request.Body
	headers := p.headers(nil, &request, now)
	var all []Rendered
	for i, t := range set.targets {
		all = append(all, rendered(c.Endpoints[i], t.to.With(request.Line).Wire(headers, p.body)))
	}
	return all, nil
}

// rendered parses a request of egress. The URL has the scheme of the config.
func rendered(e liveconfig.Endpoint, wire []byte) Rendered {
	head, body, _ := bytes.Cut(wire, []byte("\r\n\r\n"))
	lines := strings.Split(string(head), "\r\n")
	line := strings.Fields(lines[0])
	scheme, _, _ := strings.Cut(e.URL.Reveal(), ":")
	r := Rendered{Endpoint: e.Name, Method: line[0], Body: body}
	for _, text := range lines[1:] {
		name, value, _ := strings.Cut(text, ": ")
		if name == "Host" {
			r.URL = strings.ToLower(scheme) + "://" + value + line[1]
		}
		r.Headers = append(r.Headers, egress.Header{Name: name, Value: value})
	}
	return r
}
