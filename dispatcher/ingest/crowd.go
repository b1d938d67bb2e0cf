package ingest

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// maxConnections bounds the open connections that calls come on. Each takes
// 20 KB, and ten times that when somebody sends as many headers as may be and
// does not come to their end.
const maxConnections = 4096

// Bound bounds a server's open connections. When one too many comes, the one
// that has waited longest for a request makes room.
func Bound(s *http.Server, most int) { s.ConnState = newCrowd(most).follow }

// crowd is who is connected to a server. Who sends headers waits for a request,
// too. When nobody waits but the new one, that one makes room.
type crowd struct {
	most int

	mu      sync.Mutex
	places  map[net.Conn]*list.Element // of all; nil while it has a request
	waiting list.List                  // those without a request, the longest waiting first
}

func newCrowd(most int) *crowd { return &crowd{most: most, places: map[net.Conn]*list.Element{}} }

// follow is a server's ConnState.
func (c *crowd) follow(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if place := c.places[conn]; place != nil {
		c.waiting.Remove(place)
	}
	switch state {
	case http.StateNew, http.StateIdle:
		c.places[conn] = c.waiting.PushBack(conn)
	case http.StateActive:
		c.places[conn] = nil
	default:
		delete(c.places, conn)
	}
	if state == http.StateNew && len(c.places) > c.most {
		longest := c.waiting.Remove(c.waiting.Front()).(net.Conn)
		delete(c.places, longest)
		go longest.Close() // That of TLS says goodbye, and may wait for it.
	}
}
