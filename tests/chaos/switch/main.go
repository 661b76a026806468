// Program switch connects TAP devices, each the only way of a network namespace to the others.
//
// It opens the devices that its arguments name (NAME=NUMBER) and forwards each frame to the device
// whose number is the last byte of the destination's address. Rules on its standard input, one JSON
// document a line, replace all rules before; it answers each with a line. So it cuts, slows and
// loses what one node sends to one other node, which needs no netem in the kernel.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	frameBytes = 16 << 10 // above the MTU of the devices
	queueMax   = 4096     // frames that wait on one slow link; more are lost, as in a real queue
	tunSetIff  = 0x400454ca
	iffTap     = 0x0002
	iffNoPi    = 0x1000
)

// Rule is what happens to the frames of one node to one other node.
type Rule struct {
	From    int     `json:"from"`
	To      int     `json:"to"`
	Loss    float64 `json:"loss"` // 1: the link is cut
	DelayMs float64 `json:"delay_ms"`
}

type link struct {
	mutex   sync.Mutex
	pending int // frames in the queue; a frame without a delay must not overtake them
	queue   chan queued
}

type queued struct {
	due   time.Time
	frame []byte
}

type network struct {
	devices map[int]int // file descriptors by number
	links   map[[2]int]*link
	rules   atomic.Pointer[map[[2]int]Rule]
}

func open(name string) (int, error) {
	device, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("/dev/net/tun: %w", err)
	}
	var request [40]byte // struct ifreq: a name of 16 bytes, then flags
	copy(request[:15], name)
	*(*uint16)(unsafe.Pointer(&request[16])) = iffTap | iffNoPi
	_, _, code := syscall.Syscall(
		syscall.SYS_IOCTL, uintptr(device), tunSetIff, uintptr(unsafe.Pointer(&request[0])))
	if code != 0 {
		return 0, fmt.Errorf("device %s: %w", name, code)
	}
	return device, nil
}

func (n *network) forward(from int) {
	frame := make([]byte, frameBytes)
	for {
		size, err := syscall.Read(n.devices[from], frame)
		if err == syscall.EINTR || err == syscall.EAGAIN {
			continue
		}
		if err != nil {
			return // the device is gone with its namespace
		}
		if size < 14 || frame[0]&1 != 0 {
			continue // addresses are known, so nothing is sent to all
		}
		n.send(from, int(frame[5]), frame[:size])
	}
}

func (n *network) send(from, to int, frame []byte) {
	connection, known := n.links[[2]int{from, to}]
	if !known {
		return
	}
	rule := (*n.rules.Load())[[2]int{from, to}]
	if rule.Loss > 0 && rand.Float64() < rule.Loss {
		return
	}
	connection.mutex.Lock()
	defer connection.mutex.Unlock()
	if rule.DelayMs == 0 && connection.pending == 0 {
		_, _ = syscall.Write(n.devices[to], frame)
		return
	}
	due := time.Now().Add(time.Duration(rule.DelayMs * float64(time.Millisecond)))
	select {
	case connection.queue <- queued{due, append([]byte(nil), frame...)}:
		connection.pending++
	default:
	}
}

func (n *network) deliver(connection *link, to int) {
	for next := range connection.queue {
		time.Sleep(time.Until(next.due))
		connection.mutex.Lock()
		_, _ = syscall.Write(n.devices[to], next.frame)
		connection.pending--
		connection.mutex.Unlock()
	}
}

func run() error {
	n := &network{devices: map[int]int{}, links: map[[2]int]*link{}}
	n.rules.Store(&map[[2]int]Rule{})
	for _, argument := range os.Args[1:] {
		name, text, _ := strings.Cut(argument, "=")
		number, err := strconv.Atoi(text)
		if err != nil || number < 1 || number > 254 {
			return fmt.Errorf("%q is no NAME=NUMBER with a number from 1 to 254", argument)
		}
		if n.devices[number], err = open(name); err != nil {
			return err
		}
	}
	for from := range n.devices {
		for to := range n.devices {
			if from != to {
				connection := &link{queue: make(chan queued, queueMax)}
				n.links[[2]int{from, to}] = connection
				go n.deliver(connection, to)
			}
		}
	}
	for from := range n.devices {
		go n.forward(from)
	}
	fmt.Println("ready")
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	for input.Scan() {
		var list []Rule
		if err := json.Unmarshal(input.Bytes(), &list); err != nil {
			return fmt.Errorf("rules: %w", err)
		}
		rules := map[[2]int]Rule{}
		for _, rule := range list {
			rules[[2]int{rule.From, rule.To}] = rule
		}
		n.rules.Store(&rules)
		fmt.Println("ok")
	}
	return input.Err()
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "switch:", err)
		os.Exit(1)
	}
}
