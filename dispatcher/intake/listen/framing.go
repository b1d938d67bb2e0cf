package listen

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"strconv"
	"sync/atomic"
	"time"
)

// framing parses the framing of the requests of one connection: the start and end of each head and
// body. It rejects forms that can be read in two ways.
type framing struct {
	http2 bool // HTTP/2 is allowed
	state state
	// line is the start of a line that ends in a later read.
	line []byte
	// left counts the bytes to skip: of a body, a chunk or a frame.
	left int64
	// blank counts empty lines before a request.
	blank int
	// head is the number of bytes of the head that is being read.
	head int

	// State of the request whose head is being read.
	http10, chunked bool
	length          int64 // -1: no Content-Length

	// State of HTTP/2.
	frame           []byte // the start of a frame's header
	streams, resets int
	lastStream      uint32
	// sent has the frames that are written. control counts the frames without progress since the window began,
	// and opened the streams.
	sent            sentFrames
	control, opened int
	window          time.Time
}

type state uint8

const (
	beforeFirst state = iota // before the first line of the connection
	beforeRequest
	inHead
	inBody
	inChunkSize
	inChunk
	inTrailer
	inPreface
	inFrames
	inLast // net/http refuses the request and closes the connection
)

// events are the events of a scan.
type events uint8

const (
	requestEnded events = 1 << iota // HTTP/1: the last byte of a request
	streamEnded                     // HTTP/2: the last frame of a request
)

// Faults, each with the fix for the client.
var (
	errBareLF      = errors.New("a line of the head does not end with CR LF; end each line with CR LF")
	errBareCR      = errors.New("a line of the head holds a CR; remove it")
	errFolded      = errors.New("a header line begins with a space; write each header on one line")
	errHeaderName  = errors.New("a header line has no name, or a space before its colon; write NAME: VALUE")
	errVersion     = errors.New("the request line does not end with HTTP/1.1 or HTTP/1.0; send METHOD PATH HTTP/1.1")
	errBothLengths = errors.New("a request has Content-Length and Transfer-Encoding; send one of them")
	errOldChunked  = errors.New("a request of HTTP/1.0 has Transfer-Encoding; send Content-Length or HTTP/1.1")
	errLength      = errors.New("the Content-Length is not one decimal number; send it once, with digits only")
	errChunkSize   = errors.New("the size of a chunk is not a hexadecimal number; send hexadecimal digits only")
	errLongLine    = errors.New("a line of the head is too long; send shorter headers")
	errManyResets  = errors.New("too many HTTP/2 streams were reset, by the client or for its invalid frames; wait for the answers")
	errManyControl = errors.New("the client sent too many HTTP/2 frames that belong to no request; send fewer of PING, SETTINGS, PRIORITY, WINDOW_UPDATE and empty DATA")
)

const (
	// maxLine is larger than the limit of net/http for a head.
	maxLine = 2 << 20
	// maxBlank bounds the empty lines before a request; old clients send one.
	maxBlank = 2
	// A client may reset maxResets streams, and one in resetRatio of all streams that it opened. Streams that the
	// server must reset count as well.
	maxResets  = 100
	resetRatio = 10
	// A client may send maxControl frames without progress in each controlWindow, and controlRatio for each stream
	// that it opens.
	maxControl    = 1000
	controlRatio  = 10
	controlWindow = 10 * time.Second
	frameHead     = 9
)

// Types, flags and error codes of HTTP/2.
const (
	frameData, frameHeaders, frameReset, frameGoAway, frameContinuation = 0, 1, 3, 7, 9

	flagEndStream, flagEndHeaders = 1, 4

	noError, protocolError, flowControlError, streamClosed, frameSizeError, refusedStream, enhanceYourCalm = 0, 1, 3, 5, 6, 7, 11
)

// prefaceEnd is the part of HTTP/2's connection preface after its first line.
var prefaceEnd = []byte("\r\nSM\r\n\r\n")

// scan parses the bytes of a read. With a fault, sound is the number of bytes before the faulty
// line or frame; for a request line, before the line's end.
func (f *framing) scan(p []byte) (sound int, e events, fault error) {
	for i := 0; i < len(p); {
		switch f.state {
		case inLast:
			return len(p), e, nil
		case inBody, inChunk, inPreface:
			n := min(f.left, int64(len(p)-i))
			if rest := p[i : i+int(n)]; f.state == inPreface && !bytes.HasPrefix(prefaceEnd[len(prefaceEnd)-int(f.left):], rest) {
				// net/http would serve it as an HTTP/1 request.
				return i, e, errVersion
			}
			i += int(n)
			if f.left -= n; f.left > 0 {
				break
			}
			switch f.state {
			case inBody:
				e |= f.end()
			case inChunk:
				f.state = inChunkSize
			case inPreface:
				f.state = inFrames
			}
		case inFrames:
			n, ended, err := f.readFrame(p[i:])
			if err != nil {
				return i, e, err
			}
			i += n
			if ended {
				e |= streamEnded
			}
		default:
			n := bytes.IndexByte(p[i:], '\n') + 1
			if f.state <= inHead {
				f.head += cmp.Or(n, len(p)-i)
			}
			if n == 0 {
				if f.line = append(f.line, p[i:]...); len(f.line) > maxLine {
					return i, e, errLongLine
				}
				return len(p), e, nil
			}
			line := p[i : i+n]
			if len(f.line) > 0 {
				line, f.line = append(f.line, line...), nil
			}
			ended, err := f.readLine(line)
			if err != nil {
				if f.state <= beforeRequest {
					// net/http answers 400 only after it has read a part of the request.
					i += n - 1
				}
				return i, e, err
			}
			i += n
			if ended {
				e |= f.end()
			}
		}
	}
	return len(p), e, nil
}

func (f *framing) end() events {
	f.state, f.blank = beforeRequest, 0
	return requestEnded
}

// readLine parses one line. ended is true at the end of a request.
func (f *framing) readLine(line []byte) (ended bool, fault error) {
	text, ok := bytes.CutSuffix(line, []byte("\r\n"))
	switch {
	case !ok:
		return false, errBareLF
	case bytes.IndexByte(text, '\r') >= 0:
		return false, errBareCR
	}
	switch f.state {
	case beforeFirst, beforeRequest:
		return false, f.readRequestLine(text)
	case inHead:
		if len(text) > 0 {
			return false, f.readHeader(text)
		}
		return f.endHead(), nil
	case inChunkSize:
		return false, f.readChunkSize(text)
	default: // inTrailer
		if len(text) == 0 {
			return true, nil
		}
		_, _, fault = cutHeader(text)
		return false, fault
	}
}

func (f *framing) readRequestLine(text []byte) error {
	first := f.state == beforeFirst
	f.state = beforeRequest
	switch {
	case len(text) == 0:
		if f.blank++; f.blank > maxBlank {
			return errVersion
		}
		return nil
	case first && f.http2 && string(text) == "PRI * HTTP/2.0":
		f.state, f.left, f.head = inPreface, int64(len(prefaceEnd)), 0
		return nil
	case !bytes.HasSuffix(text, []byte(" HTTP/1.1")) && !bytes.HasSuffix(text, []byte(" HTTP/1.0")):
		return errVersion
	}
	f.state, f.chunked, f.length = inHead, false, -1
	f.http10 = text[len(text)-1] == '0'
	return nil
}

func (f *framing) readHeader(text []byte) error {
	name, value, fault := cutHeader(text)
	if fault != nil {
		return fault
	}
	// The length distinguishes most headers from the relevant ones.
	switch {
	case len(name) == len("Content-Length") && bytes.EqualFold(name, []byte("Content-Length")):
		n, err := strconv.ParseUint(string(value), 10, 62)
		if err != nil || f.length >= 0 {
			return errLength
		}
		f.length = int64(n)
	case len(name) == len("Transfer-Encoding") && bytes.EqualFold(name, []byte("Transfer-Encoding")):
		if f.http10 {
			return errOldChunked
		}
		if f.chunked || !bytes.EqualFold(value, []byte("chunked")) {
			f.state = inLast // net/http answers 501.
			return nil
		}
		f.chunked = true
	}
	if f.chunked && f.length >= 0 {
		return errBothLengths
	}
	return nil
}

// cutHeader splits a header line into its name and its value.
func cutHeader(text []byte) (name, value []byte, fault error) {
	if text[0] == ' ' || text[0] == '\t' {
		return nil, nil, errFolded
	}
	name, value, _ = bytes.Cut(text, []byte(":"))
	if len(name) == 0 || len(name) == len(text) || name[len(name)-1] == ' ' || name[len(name)-1] == '\t' {
		return nil, nil, errHeaderName
	}
	return name, bytes.Trim(value, " \t"), nil
}

// endHead reports whether the request ends with its head.
func (f *framing) endHead() bool {
	f.head = 0
	switch {
	case f.chunked:
		f.state = inChunkSize
	case f.length > 0:
		f.state, f.left = inBody, f.length
	default:
		return true
	}
	return false
}

func (f *framing) readChunkSize(text []byte) error {
	size, _, _ := bytes.Cut(text, []byte(";"))
	n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 60)
	switch {
	case err != nil:
		return errChunkSize
	case n == 0:
		f.state = inTrailer
	default:
		f.state, f.left = inChunk, int64(n)+int64(len("\r\n"))
	}
	return nil
}

// readFrame parses the header of an HTTP/2 frame and skips the rest of the frame. ended is true for
// the last frame of a request.
func (f *framing) readFrame(p []byte) (n int, ended bool, fault error) {
	if f.left > 0 {
		n := min(f.left, int64(len(p)))
		f.left -= n
		return int(n), false, nil
	}
	n = min(frameHead-len(f.frame), len(p))
	if f.frame = append(f.frame, p[:n]...); len(f.frame) < frameHead {
		return n, false, nil
	}
	f.left = int64(binary.BigEndian.Uint32(f.frame) >> 8)
	kind, flags, stream := f.frame[3], f.frame[4], binary.BigEndian.Uint32(f.frame[5:])&(1<<31-1)
	f.frame = f.frame[:0]
	ended = (kind == frameData || kind == frameHeaders) && flags&flagEndStream != 0
	if kind == frameHeaders || kind == frameContinuation {
		f.head += int(f.left)
		if flags&flagEndHeaders != 0 {
			f.head = 0
		}
	}
	switch {
	case kind == frameHeaders:
		if stream > f.lastStream {
			f.lastStream = stream
			f.streams++
			f.opened++
		}
	case kind == frameReset:
		f.resets++
	case kind == frameContinuation, kind == frameData && (f.left > 0 || ended):
	default:
		if f.control++; f.control > maxControl+controlRatio*f.opened {
			return 0, false, errManyControl
		}
	}
	if f.resets+int(f.sent.resets.Load()) > maxResets+f.streams/resetRatio {
		return 0, false, errManyResets
	}
	return n, ended, nil
}

// countFrom begins a new window of frames without progress if the last one has ended.
func (f *framing) countFrom(now time.Time) {
	if now.Sub(f.window) >= controlWindow {
		f.window, f.control, f.opened = now, 0, 0
	}
}

// sentFrames parses the HTTP/2 frames that a server writes, and counts the streams that it resets because of the
// client. One goroutine at a time calls scan.
type sentFrames struct {
	// resets is read by the goroutine that reads from the connection.
	resets atomic.Int64
	// head is the start of a frame's header; for a reset with its error code. left counts the bytes to skip.
	head []byte
	left int
	// ended counts the resets of streams whose rest the server has declined: it answered without the whole body,
	// and frames that were on their way are no fault of the client.
	ended map[uint32]int
}

const (
	// maxEnded bounds the streams that sentFrames remembers, and maxLate the frames on their way: a window of
	// 1 MiB has 64 frames.
	maxEnded = 1000
	maxLate  = 100
)

func (s *sentFrames) scan(p []byte) {
	for len(p) > 0 {
		if s.left > 0 {
			n := min(s.left, len(p))
			s.left -= n
			p = p[n:]
			continue
		}
		need := frameHead
		if len(s.head) >= frameHead {
			need += 4 // the error code
		}
		n := min(need-len(s.head), len(p))
		s.head, p = append(s.head, p[:n]...), p[n:]
		switch {
		case len(s.head) < need:
		case need == frameHead && s.head[3] == frameReset: // The error code follows.
		case need == frameHead:
			s.left, s.head = int(binary.BigEndian.Uint32(s.head)>>8), s.head[:0]
		default:
			s.reset(binary.BigEndian.Uint32(s.head[5:]), binary.BigEndian.Uint32(s.head[frameHead:]))
			s.head = s.head[:0]
		}
	}
}

// reset counts a stream that the server has reset with an error code.
func (s *sentFrames) reset(stream, code uint32) {
	switch code {
	case noError:
		if s.ended == nil || len(s.ended) >= maxEnded {
			s.ended = map[uint32]int{}
		}
		s.ended[stream] = 0
	case streamClosed:
		if late, ok := s.ended[stream]; ok && late < maxLate {
			s.ended[stream]++
			return
		}
		s.resets.Add(1)
	case protocolError, flowControlError, frameSizeError, refusedStream:
		s.resets.Add(1)
	}
}

// goAway is the frame that ends a connection with ENHANCE_YOUR_CALM.
func (f *framing) goAway() []byte {
	frame := []byte{0, 0, 8, frameGoAway, 0, 0, 0, 0, 0}
	frame = binary.BigEndian.AppendUint32(frame, f.lastStream)
	return binary.BigEndian.AppendUint32(frame, enhanceYourCalm)
}
