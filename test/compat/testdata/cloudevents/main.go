// Command cloudevents reads requests as "posthorn render -o json" prints them, one a line of standard input, and prints the mode, the
// type and the id of each event that the CloudEvents SDK reads from them. It fails if one has no valid event.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"

	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/cloudevents/sdk-go/v2/event"
	cehttp "github.com/cloudevents/sdk-go/v2/protocol/http"
)

func main() {
	log.SetFlags(0)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Buffer(nil, 1<<20); lines.Scan(); {
		if err := read(lines.Bytes()); err != nil {
			log.Fatal(err)
		}
	}
}

func read(line []byte) error {
	var r struct {
		Method, URL, Body string
		Headers           []struct{ Name, Value string }
	}
	if err := json.Unmarshal(line, &r); err != nil {
		return err
	}
	request, err := http.NewRequest(r.Method, r.URL, strings.NewReader(r.Body)) //nolint:noctx // It is not sent.
	if err != nil {
		return err
	}
	for _, h := range r.Headers {
		request.Header.Add(h.Name, h.Value)
	}
	message := cehttp.NewMessageFromHttpRequest(request)
	mode := message.ReadEncoding()
	var events []event.Event
	if mode == binding.EncodingBatch {
		if events, err = cehttp.NewEventsFromHTTPRequest(request); err != nil {
			return err
		}
	} else {
		e, err := binding.ToEvent(request.Context(), message)
		if err != nil {
			return err
		}
		events = append(events, *e)
	}
	for _, e := range events {
		if err := e.Validate(); err != nil {
			return err
		}
		var call struct{ Type string }
		if err := e.DataAs(&call); err != nil {
			return err
		}
		fmt.Println(mode, e.Type(), e.ID(), call.Type)
	}
	return nil
}
