"""What drivers share whose machines have a kernel of their own: that kernel, images of disks, the link, and the start
of a virtual machine's program.
"""
