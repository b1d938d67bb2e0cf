package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// trackingAPI is the address that accepts calls, with the write key of a Source.
type trackingAPI struct {
	url, writeKey string
	tls           *tls.Config
}

// request builds a request to the tracking API.
func (a trackingAPI) request(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(a.url, "/")+path, body)
	if err != nil || req.URL.Host == "" {
		return nil, command.Usagef("--address %q is not a URL like http://localhost:8080", a.url)
	}
	req.SetBasicAuth(a.writeKey, "")
	return req, nil
}

// explain adds a hint to a request error.
func (a trackingAPI) explain(err error) error {
	var dial *net.OpError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(err, &certificate):
		return fmt.Errorf("%w\nIf this is expected, use --insecure to skip verification", err)
	case errors.As(err, &dial) && dial.Op == "dial":
		return fmt.Errorf("%w\nIs Posthorn running there? Start it with 'posthorn run', or set --address", err)
	}
	return err
}

// sender connects to a dispatcher for calls; the caller of connect runs stop.
type sender interface {
	connect(ctx context.Context) (to trackingAPI, stop func(), err error)
}

// senderFlags registers a command's flags for a sender and returns the sender.
type senderFlags func(cmd *cobra.Command) sender

// directSender sends to a given address.
type directSender struct {
	address, writeKey string
	insecure          bool
}

func sendDirect(cmd *cobra.Command) sender {
	d := &directSender{}
	f := cmd.Flags()
	f.StringVar(&d.address, "address", cmp.Or(os.Getenv("POSTHORN_ADDRESS"), "http://127.0.0.1:8080"), "URL of the tracking API; the environment variable POSTHORN_ADDRESS sets another default")
	f.StringVar(&d.writeKey, "write-key", "", "the Source's write key (default: the environment variable POSTHORN_WRITE_KEY)")
	f.BoolVar(&d.insecure, "insecure", false, "do not verify the certificate of an https address")
	return d
}

func (d *directSender) connect(context.Context) (trackingAPI, func(), error) {
	to := trackingAPI{url: d.address, writeKey: cmp.Or(d.writeKey, os.Getenv("POSTHORN_WRITE_KEY"))}
	if to.writeKey == "" {
		return to, nil, command.Usagef("the write key is missing; set --write-key or POSTHORN_WRITE_KEY")
	}
	to.tls = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: d.insecure}
	return to, func() {}, nil
}
