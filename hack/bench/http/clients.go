package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// client posts to one address, with the headers of a delivery. The bounds are
// the same for all, as far as each has them: a deadline per POST, 64 KiB of
// body, no redirects, no proxies. Each decides about retries.
type client struct {
	name  string
	post  func(deadline time.Time, body []byte) (status int, err error)
	close func()
}

const (
	maxBody   = 64 << 10
	maxHead   = 64 << 10
	signature = "de7c9b85b8b78aa6bc8a7a36f70a90701c9db4d9"
	messageID = "0f8fad5b-d9cb-469f-a165-70867728950e"
	userAgent = "Posthorn/1.0"
)

func posthorn(addr string) *client {
	policy, err := egress.ParsePolicy([]string{"127.0.0.1"})
	if err != nil {
		panic(err)
	}
	c := egress.New(egress.Options{Policy: policy})
	e, err := c.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret("http://" + addr + "/in")})
	if err != nil {
		panic(err)
	}
	headers := []egress.Header{{Name: "Idempotency-Key", Value: messageID}, {Name: "X-Signature", Value: signature}}
	return &client{name: "posthorn", close: c.Close, post: func(deadline time.Time, body []byte) (int, error) {
		r := c.Post(egress.WithDeadline(context.Background(), deadline), e, headers, body)
		if r.StatusCode == 0 {
			return 0, errors.New(string(r.Reason))
		}
		return r.StatusCode, nil
	}}
}

func netHTTP(addr string) *client {
	return ofTransport("net/http", addr, &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true, MaxResponseHeaderBytes: maxHead})
}

func netHTTP2(addr string) *client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	return ofTransport("net/http, HTTP/2", addr, &http.Transport{Protocols: &protocols, DisableCompression: true, MaxResponseHeaderBytes: maxHead})
}

func ofTransport(name, addr string, transport *http.Transport) *client {
	url := "http://" + addr + "/in"
	return &client{name: name, close: transport.CloseIdleConnections, post: func(deadline time.Time, body []byte) (int, error) {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			return 0, err
		}
		request.Header = http.Header{
			"Content-Type": {"application/json"}, "User-Agent": {userAgent}, "Idempotency-Key": {messageID}, "X-Signature": {signature},
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return 0, err
		}
		defer response.Body.Close()
		if _, err := io.Copy(io.Discard, io.LimitReader(response.Body, maxBody)); err != nil {
			return 0, err
		}
		return response.StatusCode, nil
	}}
}

func fastHTTP(addr string) *client {
	c := &fasthttp.HostClient{
		Addr: addr, MaxConns: 1024, NoDefaultUserAgentHeader: true, DisablePathNormalizing: true, DisableHeaderNamesNormalizing: true,
		MaxResponseBodySize: maxBody, ReadBufferSize: maxHead,
	}
	url := "http://" + addr + "/in"
	return &client{name: "fasthttp", close: c.CloseIdleConnections, post: func(deadline time.Time, body []byte) (int, error) {
		request, response := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
		defer fasthttp.ReleaseRequest(request)
		defer fasthttp.ReleaseResponse(response)
		request.SetRequestURI(url)
		request.Header.SetMethod(fasthttp.MethodPost)
		request.Header.SetContentType("application/json")
		request.Header.SetUserAgent(userAgent)
		request.Header.Set("Idempotency-Key", messageID)
		request.Header.Set("X-Signature", signature)
		request.SetBodyRaw(body)
		if err := c.DoDeadline(request, response, deadline); err != nil {
			return 0, err
		}
		return response.StatusCode(), nil
	}}
}
