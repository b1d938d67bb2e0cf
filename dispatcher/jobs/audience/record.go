package audience

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// op is the meaning of a record in its stream.
type op byte

const (
	// opMember: in a membership or a snapshot, the user is a member.
	opMember op = 'm'
	// opRemove: in an increment, the user is removed.
	opRemove op = 'r'
	// opJoined, opLeft, opChanged and opSame (resent): in a list of changes.
	opJoined  op = 'j'
	opLeft    op = 'l'
	opChanged op = 'c'
	opSame    op = 's'
)

// record is one user in a stream that is sorted by id. The slices belong to the stream and are
// valid until its next record.
type record struct {
	op op
	id []byte
	// value is the canonical JSON of a computed trait's value; empty for an audience's member.
	value []byte
}

// stream returns the next record, or io.EOF.
type stream func() (record, error)

// empty is a stream without records.
func empty() (record, error) { return record{}, io.EOF }

var errDamaged = errors.New("the file is damaged")

const (
	fileMagic   = "PHAUD001"
	bufferBytes = 64 << 10
	endMark     = 0 // in place of an op; the count and the checksum follow
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// writer writes a file of records. The file ends with their count and a checksum, so that a
// truncated or damaged file is never mistaken for a shorter one: a missing member would be sent as
// removed.
type writer struct {
	file  vfs.File
	buf   *bufio.Writer
	sum   hash.Hash32
	count uint64
	bytes int64
	head  []byte
}

func create(fs vfs.FS, path string) (*writer, error) {
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	w := &writer{file: f, sum: crc32.New(castagnoli)}
	// The sum is first, because a vfs.File may change the bytes that it has written.
	w.buf = bufio.NewWriterSize(io.MultiWriter(w.sum, f), bufferBytes)
	if _, err := w.buf.WriteString(fileMagic); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return w, nil
}

func (w *writer) add(r record) error {
	w.head = append(w.head[:0], byte(r.op))
	w.head = binary.AppendUvarint(w.head, uint64(len(r.id)))
	w.head = append(w.head, r.id...)
	w.head = binary.AppendUvarint(w.head, uint64(len(r.value)))
	w.head = append(w.head, r.value...)
	w.count++
	w.bytes += int64(len(w.head))
	_, err := w.buf.Write(w.head)
	return err
}

// finish writes the end and closes the file; sync makes it durable first.
func (w *writer) finish(sync bool) error {
	end := binary.AppendUvarint([]byte{endMark}, w.count)
	if _, err := w.buf.Write(end); err != nil {
		return errors.Join(err, w.file.Close())
	}
	if err := w.buf.Flush(); err != nil {
		return errors.Join(err, w.file.Close())
	}
	if _, err := w.file.Write(binary.LittleEndian.AppendUint32(nil, w.sum.Sum32())); err != nil {
		return errors.Join(err, w.file.Close())
	}
	if sync {
		if err := w.file.Sync(); err != nil {
			return errors.Join(err, w.file.Close())
		}
	}
	return w.file.Close()
}

// abandon closes an unused file.
func (w *writer) abandon() { _ = w.file.Close() }

// reader reads a file of writer. It verifies the checksum at the end, so its records must not be
// used before next has returned io.EOF.
type reader struct {
	file  vfs.File
	path  string
	buf   *bufio.Reader
	sum   uint32
	count uint64
	data  []byte
	last  []byte
	some  bool
}

func open(fs vfs.FS, path string) (*reader, error) {
	f, err := fs.Open(path, vfs.SequentialReadsOption)
	if err != nil {
		return nil, err
	}
	r := &reader{file: f, path: path, buf: bufio.NewReaderSize(f, bufferBytes)}
	magic := make([]byte, len(fileMagic))
	if _, err := io.ReadFull(r.buf, magic); err != nil || string(magic) != fileMagic {
		return nil, errors.Join(fmt.Errorf("%s: %w: it has no header of a membership file", path, errDamaged), f.Close())
	}
	r.sum = crc32.Update(0, castagnoli, magic)
	return r, nil
}

func (r *reader) close() { _ = r.file.Close() }

func (r *reader) damaged(what string) error {
	return fmt.Errorf("%s: %w: %s", r.path, errDamaged, what)
}

// next implements stream.
func (r *reader) next() (record, error) {
	first, err := r.buf.ReadByte()
	if err != nil {
		return record{}, r.damaged("it ends too early")
	}
	r.data = append(r.data[:0], first)
	if op(first) == endMark {
		return record{}, r.end()
	}
	idLen, err := r.uvarint()
	if err != nil {
		return record{}, err
	}
	from := len(r.data)
	if err := r.bytes(idLen); err != nil {
		return record{}, err
	}
	to := len(r.data)
	valueLen, err := r.uvarint()
	if err != nil {
		return record{}, err
	}
	valueFrom := len(r.data)
	if err := r.bytes(valueLen); err != nil {
		return record{}, err
	}
	r.sum = crc32.Update(r.sum, castagnoli, r.data)
	r.count++
	out := record{op: op(first), id: r.data[from:to], value: r.data[valueFrom:]}
	if r.some && bytes.Compare(r.last, out.id) >= 0 {
		return record{}, r.damaged("it is not sorted")
	}
	r.last, r.some = append(r.last[:0], out.id...), true
	return out, nil
}

func (r *reader) end() error {
	count, err := r.uvarint()
	if err != nil {
		return err
	}
	r.sum = crc32.Update(r.sum, castagnoli, r.data)
	var sum [4]byte
	if _, err := io.ReadFull(r.buf, sum[:]); err != nil || count != r.count || binary.LittleEndian.Uint32(sum[:]) != r.sum {
		return r.damaged("count or checksum do not match")
	}
	return io.EOF
}

// uvarint reads a length and adds its bytes to the checksum.
func (r *reader) uvarint() (uint64, error) {
	from := len(r.data)
	for len(r.data)-from < binary.MaxVarintLen64 {
		b, err := r.buf.ReadByte()
		if err != nil {
			return 0, r.damaged("it ends too early")
		}
		r.data = append(r.data, b)
		if b < 0x80 {
			n, _ := binary.Uvarint(r.data[from:])
			return n, nil
		}
	}
	return 0, r.damaged("a length is invalid")
}

func (r *reader) bytes(n uint64) error {
	if n > MaxLineBytes {
		return r.damaged("a length is too large")
	}
	from := len(r.data)
	r.data = append(r.data, make([]byte, n)...)
	if _, err := io.ReadFull(r.buf, r.data[from:]); err != nil {
		return r.damaged("it ends too early")
	}
	return nil
}
