package delivery

import "container/heap"

// fifo is a queue of lanes, linked through the lanes themselves.
type fifo struct {
	head, tail *lane
	len        int
}

func (q *fifo) push(l *lane) {
	l.queued, l.next = true, nil
	if q.tail == nil {
		q.head = l
	} else {
		q.tail.next = l
	}
	q.tail = l
	q.len++
}

func (q *fifo) pushFront(l *lane) {
	l.queued, l.next = true, q.head
	q.head = l
	if q.tail == nil {
		q.tail = l
	}
	q.len++
}

func (q *fifo) pop() *lane {
	l := q.head
	if l == nil {
		return nil
	}
	if q.head = l.next; q.head == nil {
		q.tail = nil
	}
	l.queued, l.next = false, nil
	q.len--
	return l
}

// readyQueue has the lanes that can send, by namespace. The next lane belongs to the namespace with
// the fewest requests in flight; among equals the namespaces take turns, and so do the lanes of a
// namespace. Every operation is O(log n) for n namespaces with ready lanes.
type readyQueue struct {
	namespaces readyHeap
	len        int
	turn       uint64 // the last readyTurn of a namespace
}

func (q *readyQueue) push(l *lane) {
	l.owner.ready.push(l)
	q.pushed(l.owner)
}

// pushFront makes the lane the next one of its namespace.
func (q *readyQueue) pushFront(l *lane) {
	l.owner.ready.pushFront(l)
	q.pushed(l.owner)
}

func (q *readyQueue) pushed(n *namespace) {
	q.len++
	if n.ready.len == 1 {
		q.turn++
		n.readyTurn = q.turn
		heap.Push(&q.namespaces, n)
	}
}

func (q *readyQueue) pop() *lane {
	if len(q.namespaces) == 0 {
		return nil
	}
	n := q.namespaces[0]
	l := n.ready.pop()
	q.len--
	q.turn++
	n.readyTurn = q.turn
	if n.ready.len == 0 {
		heap.Pop(&q.namespaces)
	} else {
		heap.Fix(&q.namespaces, 0)
	}
	return l
}

// changed restores the order after the requests in flight of a namespace changed.
func (q *readyQueue) changed(n *namespace) {
	if n.ready.len > 0 {
		heap.Fix(&q.namespaces, n.readyIndex)
	}
}

// readyHeap implements heap.Interface.
type readyHeap []*namespace

func (h readyHeap) Len() int { return len(h) }

func (h readyHeap) Less(i, j int) bool {
	if h[i].inFlight != h[j].inFlight {
		return h[i].inFlight < h[j].inFlight
	}
	return h[i].readyTurn < h[j].readyTurn
}

func (h readyHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].readyIndex, h[j].readyIndex = i, j
}

func (h *readyHeap) Push(x any) {
	n := x.(*namespace)
	n.readyIndex = len(*h)
	*h = append(*h, n)
}

func (h *readyHeap) Pop() any {
	old := *h
	n := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return n
}

// blockedQueue has the lanes that wait for their share. The namespaces take turns, and so do the
// lanes of a namespace. Every operation is O(1).
type blockedQueue struct {
	head, tail *waitingLanes
	len        int
}

// waitingLanes are the lanes of a namespace in a blockedQueue. They are linked while there are any.
type waitingLanes struct {
	lanes fifo
	next  *waitingLanes
}

func (q *blockedQueue) push(n *waitingLanes, l *lane) {
	n.lanes.push(l)
	q.len++
	if n.lanes.len == 1 {
		q.append(n)
	}
}

// pushFront makes the lane the next one of its namespace, and the namespace the next one unless it waits already.
func (q *blockedQueue) pushFront(n *waitingLanes, l *lane) {
	n.lanes.pushFront(l)
	q.len++
	if n.lanes.len == 1 {
		n.next, q.head = q.head, n
		if q.tail == nil {
			q.tail = n
		}
	}
}

func (q *blockedQueue) pop() *lane {
	n := q.head
	if n == nil {
		return nil
	}
	if q.head = n.next; q.head == nil {
		q.tail = nil
	}
	n.next = nil
	l := n.lanes.pop()
	q.len--
	if n.lanes.len > 0 {
		q.append(n)
	}
	return l
}

// skip gives the turn of the next namespace to the one after it. The queue must not be empty.
func (q *blockedQueue) skip() {
	if n := q.head; n.next != nil {
		q.head, n.next = n.next, nil
		q.append(n)
	}
}

func (q *blockedQueue) append(n *waitingLanes) {
	if q.tail == nil {
		q.head = n
	} else {
		q.tail.next = n
	}
	q.tail = n
}
